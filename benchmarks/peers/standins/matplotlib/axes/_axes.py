"""Only names, which annotations use."""


class Axes:
    pass
