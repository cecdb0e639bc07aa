#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pictures of all pages of site/ (after `make docs`) to look at: wide, narrow, dark. No other host is in reach.
# usage: scripts/docs/screenshots.sh OUT [WORDS]   needs chromium; WORDS: a pattern of pages
set -euo pipefail
cd "$(dirname "$0")/../../site"
out=$(realpath -m "${1:?usage: scripts/docs/screenshots.sh OUT [WORDS]}") words=${2:-.} port=8917
mkdir -p "$out"
python3 -m http.server "$port" --bind 127.0.0.1 > "$out/requests.log" 2>&1 &
trap 'kill '$! EXIT
sleep 1

shoot() { # PAGE SUFFIX OPTION...
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000 \
        --host-resolver-rules="MAP * ~NOTFOUND, EXCLUDE 127.0.0.1" "${@:3}" \
        --screenshot="$out/$(basename "/${1//\//_}index")$2.png" "http://127.0.0.1:$port/$1" > /dev/null 2>&1
}

find . -name index.html -printf '%P\n' | sed 's/index.html$//' | grep -E "$words" | sort | while read -r page; do
    shoot "$page" "" --window-size=1280,2400
    shoot "$page" .narrow --window-size=400,2400
    shoot "$page" .dark --window-size=1280,2400 --blink-settings=preferredColorScheme=0
done
