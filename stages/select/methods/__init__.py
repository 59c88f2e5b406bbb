"""Selectors, one a file; the class in each subclasses `stages.select.selector.Selector`."""
