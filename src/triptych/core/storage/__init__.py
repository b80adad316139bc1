"""Files of a checkpoint, local or on the Hub: configuration and tensors, for reading and copying.

`Settings` (`settings.py`) evaluates expressions over a configuration. `tensors.py` reads single tensors from
files, `hub.py` from ranges of files over HTTP, and `quantised.py` dequantises them. `copying.py` copies a
folder and `shards.py` a file, with some tensors replaced. Start with `tensors.py`.
"""

from triptych.core.storage.copying import CERTIFICATE as CERTIFICATE
from triptych.core.storage.copying import CONFIG as CONFIG
from triptych.core.storage.copying import FolderCopy as FolderCopy
from triptych.core.storage.copying import is_own as is_own
from triptych.core.storage.copying import names_beside as names_beside
from triptych.core.storage.copying import require_new_folder as require_new_folder
from triptych.core.storage.copying import require_own as require_own
from triptych.core.storage.copying import set_entry as set_entry
from triptych.core.storage.gguf import SUFFIX as SUFFIX
from triptych.core.storage.gguf import Gguf as Gguf
from triptych.core.storage.quantised import dequantised as dequantised
from triptych.core.storage.settings import Settings as Settings
from triptych.core.storage.shards import tensor_hash as tensor_hash
from triptych.core.storage.tensors import PICKLED_INDEX as PICKLED_INDEX
from triptych.core.storage.tensors import SAFETENSORS as SAFETENSORS
from triptych.core.storage.tensors import SAFETENSORS_INDEX as SAFETENSORS_INDEX
from triptych.core.storage.tensors import InMemory as InMemory
from triptych.core.storage.tensors import Safetensors as Safetensors
from triptych.core.storage.tensors import TensorFile as TensorFile
from triptych.core.storage.tensors import TensorInfo as TensorInfo
from triptych.core.storage.tensors import Tensors as Tensors
from triptych.core.storage.tensors import of_one as of_one
from triptych.core.storage.tensors import open_tensors as open_tensors
