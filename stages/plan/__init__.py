"""The verb *plan*: which way of training fits what is left of the budget, and what it will cost."""
