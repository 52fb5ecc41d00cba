"""Turn a recorded step into a solver's problem, and a solver's answer back into calls; knows both, runs no model.

`bridge` puts the parts together; `memory` says what is alive and what a plan can free; `hazards` what forbids a replay;
`candidates` which intervals are offered and what each costs; `save_rules` which operators a segment may keep; `names`
turns what was chosen back into module calls.
"""
