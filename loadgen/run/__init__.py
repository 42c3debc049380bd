"""A run: a target is opened, the load is sent, the rows are recorded, the page is written."""
