#!/usr/bin/env bash
# Builds libdustin_trt_plugins.so with the tools of a container or a machine, without .venv.
set -euo pipefail

usage() {
  cat <<'END'
usage: build_scripts/build_plugins.sh [--tensorrt DIR] [--architectures LIST] [--output DIR] [--jobs N]

Builds the TensorRT plugins, libdustin_trt_plugins.so, for dustin-trt build, trtexec --dynamicPlugins
and every program that loads engines with them. Needs a C++17 compiler, CMake 3.18, CUDA 12.8 or
newer (nvcc) and the headers of the TensorRT that will load it: no TensorRT library, no GPU.

  --tensorrt DIR        TensorRT, or a clone of github.com/NVIDIA/TensorRT at that version
                        (default: TENSORRT_ROOT, then where packages install it)
  --architectures LIST  compute capabilities (default: 80-real;90a-real;100-real: Ampere and newer
                        consumer GPUs, Hopper, data-centre Blackwell)
  --output DIR          copy the library there, too (the package finds its own in dustin_trt/lib;
                        another one by the variable DUSTIN_TRT_PLUGINS)
  --jobs N              compilers at a time (default: one a processor)

In an IMAGE that has CUDA, CMake and TensorRT 10.14 or newer:

  docker run --rm -v "$PWD:/dustin-trt" -w /dustin-trt IMAGE \
      build_scripts/build_plugins.sh --architectures 90a-real
END
}

fail() { echo "build_plugins.sh: error: $*" >&2; exit 2; }

tensorrt=${TENSORRT_ROOT:-} architectures="80-real;90a-real;100-real" output="" jobs=$(nproc)
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --tensorrt | --architectures | --output | --jobs)
      (($# > 1)) || fail "$1 needs a value (--help)"
      declare "${1#--}=$2"; shift 2 ;;
    *) fail "unknown option $1 (--help)" ;;
  esac
done

[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs is a number of 1 or more, not '$jobs'"
[[ -z $tensorrt || -d $tensorrt ]] || fail "there is no folder $tensorrt (--tensorrt)"
[[ -z $output || -d $output ]] || fail "there is no folder $output (--output)"
command -v cmake >/dev/null || fail "cmake is not on PATH: install it, or python3 -m pip install cmake"
nvcc=$(command -v nvcc || true)
[[ -n $nvcc || ! -x /usr/local/cuda/bin/nvcc ]] || nvcc=/usr/local/cuda/bin/nvcc
[[ -n $nvcc ]] || fail "nvcc is not on PATH: install CUDA 12.8 or newer"

[[ -z $tensorrt ]] || tensorrt=$(cd "$tensorrt" && pwd)
[[ -z $output ]] || output=$(cd "$output" && pwd)
cd "$(dirname "$0")/.."
build=build/plugins
# TensorRT may be another one than last time.
rm -f $build/CMakeCache.txt
cmake -S . -B $build -DDUSTIN_CUDA=ON -DDUSTIN_TENSORRT=ON -DCMAKE_CUDA_COMPILER="$nvcc" \
  -DDUSTIN_CUDA_ARCHITECTURES="$architectures" ${tensorrt:+-DTENSORRT_ROOT="$tensorrt"}
cmake --build $build --target dustin_trt_plugins -j "$jobs"
library=$PWD/dustin_trt/lib/libdustin_trt_plugins.so
if [[ -n $output && $output != "$PWD/dustin_trt/lib" ]]; then
  cp "$library" "$output/"
  library=$output/libdustin_trt_plugins.so
fi
echo "$library"
