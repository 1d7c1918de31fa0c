"""From tasks to scored groups: requests to the engine, rewards in worker processes, groups closed and replaced."""
