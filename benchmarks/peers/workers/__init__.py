"""Programs of the peers' own environments. Nothing here may import forerun but its own worker."""
