"""The figures as a table, a plot, a file and a page."""
