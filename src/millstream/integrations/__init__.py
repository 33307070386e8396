"""What people have already: one module per package or format, named after it."""
