"""What is counted, by which names, and how the counts of many agents become one."""
