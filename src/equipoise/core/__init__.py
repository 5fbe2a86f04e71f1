"""The bottom layer: errors, files written whole, random streams, tables of settings. It knows no method, no image."""
