// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// warningPlugin returns a plugin that logs a warning in each CNI operation.
func warningPlugin() Plugin {
	verb := func(r *Request) error { r.Log.Warn("hello", "device", "eth0\n2"); return nil }
	add := func(r *Request) (*types100.Result, error) { return &types100.Result{}, verb(r) }
	return Plugin{Name: "x", NoNetns: true, Add: add, Del: verb, Check: verb, GC: verb, Status: verb}
}

// TestLogFileFails: what the log file does not take, for example on a full disk, goes to stderr, and the verb succeeds.
func TestLogFileFails(t *testing.T) {
	p := warningPlugin()
	p.Del = func(r *Request) error { r.logTo.Close(); r.Log.Warn("hello"); return nil }
	o := run(p, newEnv("DEL"), config(`"logFile": "`+filepath.Join(t.TempDir(), "x.log")+`"`))
	if o.exit != 0 || !strings.Contains(o.stderr, "msg=hello") || !strings.Contains(o.stderr, "file already closed") {
		t.Errorf("exit %d, stderr %q", o.exit, o.stderr)
	}
}

// The log goes only to the file and contains the error of the operation, but no warnings if logLevel is "error".
func TestLogToFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	read := func() string {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if o := run(warningPlugin(), newEnv("DEL"), config(`"logFile": "`+path+`"`)); o.exit != 0 || o.stderr != "" ||
		!strings.Contains(read(), "msg=hello") {
		t.Errorf("exit %d, stderr %q, file %q", o.exit, o.stderr, read())
	}
	run(failing(errors.New("it broke")), newEnv("DEL"), config(`"logFile": "`+path+`", "logLevel": "error"`)).mustFail(t, CodeIO)
	if !strings.Contains(read(), `level=ERROR msg="it broke"`) {
		t.Errorf("file %q", read())
	}
	inPart := failing(errors.New("part broke"))
	inPart.Del = func(r *Request) error { r.Plugin += " (part)"; return errors.New("part broke") }
	run(inPart, newEnv("DEL"), config(`"logFile": "`+path+`"`))
	if log := read(); !strings.Contains(log, `msg="part broke" plugin="`+inPart.Name+` (part)"`) {
		t.Errorf("file %q", log)
	}
	before := read()
	if run(warningPlugin(), newEnv("DEL"), config(`"logFile": "`+path+`", "logLevel": "error"`)); read() != before {
		t.Errorf("a warning at level error: %q", strings.TrimPrefix(read(), before))
	}
	if o := run(warningPlugin(), newEnv("DEL"), config(`"logFile": "/proc/none"`)); !strings.Contains(o.stderr, "cannot write to logFile") ||
		!strings.Contains(o.stderr, "msg=hello") {
		t.Errorf("stderr %q", o.stderr)
	}
}

// An invalid logLevel or logFile is an error before anything changes or a log file exists. DEL and GC ignore it.
func TestWrongLogKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.log")
	for _, c := range []struct {
		keys, says string
		code       uint
	}{
		{`"logFile": "` + file + `", "logLevel": "loud"`, `logLevel "loud": want debug, info, warning, error or panic`, CodeConfig},
		{`"logFile": "x.log"`, `logFile "x.log": want an absolute path, or journal`, CodeConfig},
		{`"logFile": 5`, "logFile", CodeDecode},
	} {
		for _, verb := range []string{"ADD", "STATUS"} {
			e := newEnv(verb).with("CNI_NETNS", "/run/netns/x")
			if f := run(warningPlugin(), e, `{"cniVersion":"1.1.0","name":"net",`+c.keys+`}`).mustFail(t, c.code); !strings.Contains(f.Msg, c.says) {
				t.Errorf("%s with %s: %s", verb, c.keys, f.Msg)
			}
		}
		if _, err := os.Stat(file); !os.IsNotExist(err) {
			t.Errorf("%s: %s exists", c.keys, file)
		}
		if err := CheckLogging([]byte("{" + c.keys + "}")); Code(err) != c.code {
			t.Errorf("CheckLogging of %s: %v", c.keys, err)
		}
		if o := run(warningPlugin(), newEnv("DEL"), config(c.keys)); o.exit != 0 {
			t.Errorf("DEL with %s: %s", c.keys, o.stdout)
		}
		_ = os.Remove(file) // DEL logs there
	}
	if err := CheckLogging([]byte(`{"logFile": "journal", "logLevel": "debug"}`)); err != nil {
		t.Error(err)
	}
}

// Without logLevel and logFile, the log goes to stderr.
func TestLogOnStderr(t *testing.T) {
	opened := true
	p := Plugin{Name: "x", Del: func(r *Request) error { opened = r.logTo != nil || r.journal != nil; return nil }}
	if o := run(p, newEnv("DEL"), config("")); o.exit != 0 || opened {
		t.Errorf("exit %d, opened %v", o.exit, opened)
	}
}

// listenJournal receives messages in place of journald, and returns a function that returns the fields of the next one.
func listenJournal(t *testing.T) func() map[string]string {
	t.Helper()
	if _, err := os.Stat(filepath.Dir(journalSocket)); err == nil {
		t.Skip("SKIPPED: this machine has journald, and its socket is not for tests")
	}
	if err := os.MkdirAll(filepath.Dir(journalSocket), 0o755); err != nil {
		t.Skipf("SKIPPED: it needs a /run of its own: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll("/run/systemd") })
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: journalSocket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return func() map[string]string {
		data := make([]byte, 64<<10)
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		n, err := conn.Read(data)
		if err != nil {
			t.Fatal(err)
		}
		fields := map[string]string{}
		for line := range strings.Lines(string(data[:n])) {
			name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			if _, twice := fields[name]; !ok || twice {
				t.Errorf("line %q", line)
			}
			fields[name] = value
		}
		return fields
	}
}

// Without journald, the log goes to stderr.
func TestNoJournal(t *testing.T) {
	if _, err := os.Stat(journalSocket); err == nil {
		t.Skip("SKIPPED: this machine has journald")
	}
	o := run(warningPlugin(), newEnv("DEL"), config(`"logFile": "journal"`))
	if o.exit != 0 || !strings.Contains(o.stderr, "connect to journald at "+journalSocket) || !strings.Contains(o.stderr, "msg=hello") {
		t.Errorf("exit %d, stderr %q", o.exit, o.stderr)
	}
}

func TestLogToJournal(t *testing.T) {
	next := listenJournal(t)
	e := newEnv("DEL").with("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0", "TRACEPARENT", traceparent)
	if o := run(warningPlugin(), e, config(`"logFile": "journal"`)); o.exit != 0 || o.stderr != "" {
		t.Errorf("exit %d, stderr %q", o.exit, o.stderr)
	}
	want := map[string]string{"SYSLOG_IDENTIFIER": "podlace", "PRIORITY": "4", "MESSAGE": `x del: hello device="eth0\n2"`,
		"PODLACE_DEVICE": "eth0 2", "PODLACE_PLUGIN": "x", "PODLACE_VERB": "DEL", "PODLACE_NETWORK": "net", "PODLACE_POD": "shop/web-0",
		"PODLACE_CONTAINER": "pod-1", "PODLACE_IFNAME": "eth0", "TRACE_ID": "4bf92f3577b34da6a3ce929d0e0e4736", "SPAN_ID": "00f067aa0ba902b7"}
	if diff := cmp.Diff(want, next()); diff != "" {
		t.Error(diff)
	}
	run(failing(errors.New("it broke\nPRIORITY=7")), e, config(`"logFile": "journal"`)).mustFail(t, CodeIO)
	if got := next(); got["PRIORITY"] != "3" || got["MESSAGE"] != "x del: it broke PRIORITY=7" {
		t.Errorf("got %q", got)
	}
	run(failing(errors.New(strings.Repeat("x", 1<<20))), e, config(`"logFile": "journal"`)).mustFail(t, CodeIO)
	if got := next(); len(got["MESSAGE"]) > maxField+3 {
		t.Errorf("%d bytes", len(got["MESSAGE"]))
	}
}

// A message that journald does not take goes to stderr.
func TestJournalRefuses(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	unix.Close(pair[1])
	var stderr strings.Builder
	r := &Request{Plugin: "x", Verb: "ADD", log: &stderr}
	slog.New((&journal{pair[0]}).newHandler(r)).With("a", 1).Info("hello", "b", "two words")
	if got := stderr.String(); !strings.HasPrefix(got, `x add: hello a="1" b="two words" (journald: `) || strings.Count(got, "\n") != 1 {
		t.Errorf("stderr %q", got)
	}
}
