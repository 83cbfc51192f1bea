"""Shows the figures in tables, plots, files and a page."""
