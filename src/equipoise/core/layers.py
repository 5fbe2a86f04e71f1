"""The order of Equipoise's packages, from bottom to top: a package imports only packages that stand before it."""

#: modules at the root that hold pure mathematics, together with the package of losses
MATHS = ("losses", "aggregation", "prototypes", "metrics", "statistics")

#: from bottom to top
LAYERS = (
    ("core",),
    MATHS,
    ("data",),
    ("nets",),
    ("tasks",),
    ("contract",),
    ("components",),
    ("methods",),
    ("engine",),
    ("hospitals",),
    ("report",),
    ("studies",),
    ("api",),
    ("cli",),
)
