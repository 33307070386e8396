"""What a pipeline does, as a table: stages and the plan, without reading anything."""
