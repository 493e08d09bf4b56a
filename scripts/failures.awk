# SPDX-License-Identifier: Apache-2.0
# failures.awk: reads the log of "go test -v" and describes each failed test that has no failed subtest. The output is the test's name, the
# first sentence of its comment, its last log lines, and the command that runs only this test. For a package that does not build or ends early,
# the output is the last lines of the package.
/^=== (RUN|NAME|CONT) / { name = $3; next }
/^=== / { next }
/^panic: / { early = $0 }
/^\t*running tests:/ { running = 1; next }
running && /^\t+Test/ { failed[++n] = $1; say($1, early); next }
{ running = 0 }
/^ *--- FAIL: / { failed[++n] = $3 }
/^ *--- / { next }
/^[^ ]+\.go:[0-9]+:[0-9]+: / && early == "" { early = $0 }
/^FAIL\t/ {
  for (i = 1; i <= n; i++) {
    leaf = 1
    for (j = 1; j <= n; j++) if (index(failed[j], failed[i] "/") == 1) leaf = 0
    if (leaf) tell($2, failed[i])
  }
  if (n == 0) print "\n" $2 "\n  " (/build failed|setup failed/ ? "does not build" : "ended early, after " name) (early == "" ? "" : "\n  " early) "\n  go test " folder($2) " -count=1"
}
/^(FAIL|ok  )\t/ {
  n = 0
  name = early = ""
  delete said
  delete lines
  next
}
!/^(PASS|FAIL)$/ { say(name, $0) }
# say keeps the last 30 lines of a test.
function say(test, line) {
  said[test, lines[test]++ % 30] = line
}
function folder(pkg) {
  sub(/^github.com\/podlace\/podlace/, ".", pkg)
  return pkg
}
function tell(pkg, test,    dir, top, speaker, k, promise, cmd, run) {
  dir = folder(pkg)
  top = test
  sub(/\/.*/, "", top)
  cmd = "grep -hs -A3 '^// " top "[ :]' " dir "/*_test.go | sed -n '/^\\/\\/ /{s/^\\/\\/ //;p}' | tr '\\n' ' '"
  cmd | getline promise
  close(cmd)
  sub(/\. .*/, ".", promise)
  print "\n" test "\n  " (promise == "" ? "(no comment)" : promise)
  speaker = lines[test] ? test : top
  if (!lines[speaker]) print "  (it said nothing)"
  if (lines[speaker] > 30) print "  (" lines[speaker] - 30 " lines before)"
  for (k = lines[speaker] > 30 ? lines[speaker] - 30 : 0; k < lines[speaker]; k++) print "  " said[speaker, k % 30]
  run = test
  gsub(/[][().*+?^$|{}\\]/, "\\\\&", run)
  gsub(/'/, "'\\''", run)
  gsub(/\//, "$/^", run)
  print "  " go " " dir " -count=1 -run '^" run "$'"
}
