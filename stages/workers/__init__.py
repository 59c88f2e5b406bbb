"""The noun *workers*: the same function run in this process or by Ray; the only importer of ray."""
