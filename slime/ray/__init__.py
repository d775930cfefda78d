"""A run as Ray actors: `driver.Driver` is the loop, `actors.Actors` the processes, `checkpoints` the files.

Nothing is imported here: Ray loads when a run starts.
"""
