"""Where a teacher's signals come from: a model in memory, stored files, a server, or the student with a hint."""
