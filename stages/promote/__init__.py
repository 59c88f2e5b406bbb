"""The verb `promote`: moves the alias, if the verdict says so and the alias still is what the verdict saw."""
