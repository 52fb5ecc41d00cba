"""Pictures of profiles, plans and what was found: it draws values, and knows nothing of how they were found."""
