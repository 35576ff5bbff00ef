#!/bin/bash
# Python 3.11, torch and evenstep for ARM in a folder, run by qemu without a root file system of its own.
#
#     tests/support/arm.sh FOLDER       (Debian 12, as root; 400 MB, a minute)
#     FOLDER/python script.py           (PYTHONPATH of the caller is added to its packages)
#
# torch 2.9.1 is the last version whose wheel for ARM needs none of CUDA's libraries.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
apt-get install -y -qq qemu-user-static g++-aarch64-linux-gnu > /dev/null
dpkg --add-architecture arm64 && apt-get update -qq
mkdir -p "$1"/{debs,root,wheels,site} && cd "$1" && here=$PWD

libraries="libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1
    libncursesw6 libtinfo6 libgomp1 libpython3.11-stdlib libpython3.11-minimal python3.11-minimal"
(cd debs && apt-get download -qq $(printf '%s:arm64 ' $libraries) 2> /dev/null)
for package in debs/*.deb; do dpkg -x "$package" root; done

wheels() { python3 -m pip download -q --no-deps --python-version 3.11 --only-binary=:all: -d wheels "$@"; }
wheels --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    torch==2.9.1 numpy optree safetensors markupsafe
wheels --platform any typing_extensions sympy mpmath networkx jinja2 fsspec filelock setuptools rich \
    click tqdm pooch platformdirs packaging requests
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done

cp -r "$source/src/evenstep" site/ && rm -f site/evenstep/arithmetic/lib/*.so
python3 - << END
import sys
sys.path.insert(0, "site/evenstep/arithmetic")
import compile
compile.compile_all(with_compiler="aarch64-linux-gnu-gcc", target="aarch64")
END
cat > python << END
#!/bin/bash
exec qemu-aarch64-static -L $here/root -E PYTHONPATH=$here/site:\$PYTHONPATH $here/root/usr/bin/python3.11 "\$@"
END
chmod +x python
