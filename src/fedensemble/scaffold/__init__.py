"""New projects: what `fedensemble new` writes, and how commands find the parts of a project."""
