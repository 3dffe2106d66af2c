"""Everything that traced Python can read: followed from a loss function and a model, compared before each step.

walk.py       from a loss function and a model to all places, as far as traced code can look: `walk`, `Reach`
places.py     places that hold values: modules, objects, collections
callables.py  places that are called: functions, decorators around them, classes, bound methods
places.py   the names in a function's code
snapshots.py      compare everything that was reached by identity, fast: `Watch`
snapshots.py  a number for everything that was read: the same content again, the same number: `Snapshots`
restore.py    undo what the user's Python did while it was traced: kept tensors, moved random numbers: `untouched`
"""
