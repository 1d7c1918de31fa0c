"""In place of torchvision, whose names are imported for models that see images."""

import placeholder

__version__, __path__, __getattr__ = "0", [], placeholder.attribute
placeholder.submodules(__name__)
