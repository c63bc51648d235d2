#!/bin/sh
# Checks what the machine must bring, before anything is built. Each missing thing is named with its fix.
# usage: preflight.sh PYTHON CXX
python=$1
cxx=$2
fail() { printf 'pinnate: %s\n  fix: %s\n' "$1" "$2" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 ||
  fail "no Python found ('$python')" "install Python 3.11 or newer (Debian: apt-get install python3 python3-venv), or make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version 2>&1) is too old, 3.11 or newer is needed" "install a newer Python, then make PYTHON=python3.11"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
  fail "this Python lacks the venv module" "Debian: apt-get install python3-venv"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
  fail "this Python's C headers are missing" "Debian: apt-get install python3-dev"
command -v "$cxx" >/dev/null 2>&1 ||
  fail "no C++ compiler found ('$cxx')" "Debian: apt-get install g++ (12 or newer), or make CXX=clang++"
printf '#include <concepts>\nint main() { return 0; }\n' | "$cxx" -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1 ||
  fail "'$cxx' does not compile C++20" "install g++ 12 or clang 15, or newer"
