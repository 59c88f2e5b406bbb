"""Text: normal forms, word n-grams, near-duplicates, extracted answers. No tokenizer, no tensor."""
