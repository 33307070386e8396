"""Files: written whole, opened with care, here or at an address; and plain values as bytes. Imports no JAX."""
