"""What every stage stands on: errors, random streams, folders, the system."""
