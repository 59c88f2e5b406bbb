"""Figures and pages that stages leave beside their tables: what is drawn of many rows, and HTML that works offline."""
