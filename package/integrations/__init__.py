"""Plan at the first batch inside the trainers that people use; knows trainers, not how a plan is found."""

from .first_batch import FirstPlan, FirstPlanKeywords, plan_once

__all__ = ["FirstPlan", "FirstPlanKeywords", "plan_once"]
