"""Python state of a model and its script, which every rank has for itself.

=================== ================================================================================
`snapshot`          what slots of modules, objects and containers hold at one moment, and who uses them
`left_behind`       a trace leaves the model as it was, and no stand-in anywhere
`filled_containers` what a unit puts into lists and dictionaries among its arguments is a result
`shared_state`      units that share an object which one of them changes are on one rank
`attribute_use`     what a microbatch writes between units it finds again on its next stage
`attribute_watch`   what a script sets between steps may make another trace necessary
`watched_numbers`   for which numbers among the arguments a trace holds
=================== ================================================================================
"""
