"""Everything that traced Python can read: followed from a loss function and a model, compared before each step.

walk.py       from a loss function and a model to all places, as far as traced code can look: `walk`, `Reach`
places.py     places that hold values: modules, objects, collections
tensor_attributes.py  places that a tensor's own attributes are
callables.py  places that are called: functions, decorators around them, classes, bound methods
names.py      the names in a function's code
iterators.py  where an iterator or a stream is
snapshots.py  compare everything that was reached by identity, fast; a number for all of it, the same where it comes
              again: `Snapshots`
restore.py    undo what the user's Python did while it was traced: `untouched`
draws.py      refuse what it drew, or took from an iterator: `Draws`
"""
