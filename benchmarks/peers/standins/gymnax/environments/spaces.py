"""Only names, which JaxMARL's wrappers compare types with."""


class Box:
    pass


class Discrete:
    pass
