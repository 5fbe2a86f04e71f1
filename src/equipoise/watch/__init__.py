"""A local page that follows a run, a study, a federation or a hospital's site while it works; it reads files only."""
