from .bootstrap import bootstrap as bootstrap
from .picker import Picker as Picker
