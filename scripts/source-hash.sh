#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# source-hash.sh: prints a hash of the sources that the binaries are built from. The hash does not depend on file times, so a copy of
# the tree has the same hash.
set -euo pipefail
find go.mod go.sum conf/*.go pkg plugins -type f ! -name '*_test.go' ! -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
