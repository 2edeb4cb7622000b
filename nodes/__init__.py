"""The nodes: one file per feature, each a schema and one call."""
