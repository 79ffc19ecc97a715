"""Only a name: the config is a plain dictionary already."""


class OmegaConf:
    pass
