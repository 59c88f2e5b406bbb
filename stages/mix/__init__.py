"""The verb mix: what share of the next selection each part of the pool gets, and in which phase it is introduced."""
