"""Lists what is registered: algorithms, schedules, datasets, models, and their options."""
