#!/usr/bin/env bash
# Kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a temporary copy.
#
#   scripts/asan_check.sh                          every kernel test
#   scripts/asan_check.sh tests/unit/kernels/test_ops.py -k gate
#
# Needs g++ and `make install`; PYTHON chooses another interpreter. The first finding ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cp -r setup.py pyproject.toml README.md LICENSE src tests "$copy"
cd "$copy"
find src -name '*.so' -delete
# The extension's own -O3 would win: with every check in it the attention kernel takes minutes then.
sed -i 's/"-O3"/"-O1"/' setup.py

flags="-g -O1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" CXX=g++ \
  "$python" setup.py --quiet build_ext --inplace --parallel "$(nproc)"

export PYTHONPATH="$copy/src" OMP_NUM_THREADS=2
# Python itself is not instrumented: the runtimes come first, and its own leaks are not ours.
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"

# A read past the end on purpose: unless it is found, a clean run proves nothing.
LD_PRELOAD="$preload" "$python" - 2>overflow.log <<'EOF' || true
from ctypes import byref

import torch

from forerun.kernels import find_kernels
from forerun.kernels.abi import NormParams

x, weight, out = torch.randn(1, 1000), torch.ones(1000), torch.empty(1, 1000)
params = NormParams(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), x_stride=1000)
params.out_stride = params.weight_stride = 1000
params.num_rows = params.num_heads = params.num_threads = 1
params.size, params.eps = 1040, 1e-5
find_kernels().norm(byref(params))
EOF
if ! grep -q "ERROR: AddressSanitizer" overflow.log; then
  head -5 overflow.log >&2
  echo "AddressSanitizer does not see the kernels: nothing was checked" >&2
  exit 1
fi

# Those of the loader run compilers and other processes, which a preloaded runtime disturbs.
if [ $# -eq 0 ]; then
  set -- tests/unit/kernels --ignore tests/unit/kernels/test_loader.py \
    --ignore tests/unit/kernels/test_fallback.py
fi
LD_PRELOAD="$preload" "$python" -m pytest -s -p no:cacheprovider "$@"
