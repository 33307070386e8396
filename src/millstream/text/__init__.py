"""What people read: words of errors, tables, lines of progress."""
