// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// victimEnv makes the test program run the IPAM plugin in the folder that it names, until the test kills it.
const victimEnv = "IPAM_TEST_VICTIM"

func TestMain(m *testing.M) {
	if dir := os.Getenv(victimEnv); dir != "" {
		_, err := Runner{}.Add(request(dir), "fake")
		fmt.Println(err)
		return
	}
	os.Exit(m.Run())
}

func request(path ...string) *plugin.Request {
	return &plugin.Request{Plugin: "bridge", Verb: "ADD", Network: "net", ContainerID: "id", IfName: "eth0", CNIVersion: "1.0.0", Path: path,
		Config: []byte(`{"cniVersion":"1.0.0","name":"net"}`), Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// externalPlugin creates an IPAM plugin in a new folder: a shell script that logs each call and then runs body.
func externalPlugin(t *testing.T, body string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	script := "#!/bin/sh\necho \"$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $(cat)\" >> " + dir + "/log\n" + body + "\n"
	if err := os.WriteFile(filepath.Join(dir, "fake"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CNI_CONTAINERID", "of the caller")
	t.Setenv("CNI_COMMAND", "GC")
	return dir
}

func calls(t *testing.T, dir string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// An external plugin gets the standard input and environment of its caller, but the CNI command and attachment of the request.
func TestForeign(t *testing.T) {
	dir := externalPlugin(t, `[ "$CNI_COMMAND" = ADD ] && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.5/24"}]}'; exit 0`)
	r := request("/nonexistent", dir)
	result, err := Runner{}.Add(r, "fake")
	if err != nil || len(result.IPs) != 1 || result.IPs[0].Address.String() != "10.1.0.5/24" {
		t.Errorf("got %+v, %v", result, err)
	}
	run := Runner{}
	for _, err := range []error{run.Check(r, "fake"), run.GC(r, "fake"), run.Status(r, "fake"), run.Del(r, "fake")} {
		if err != nil {
			t.Error(err)
		}
	}
	var want strings.Builder
	for _, verb := range []string{"ADD", "CHECK", "GC", "STATUS", "DEL"} {
		fmt.Fprintf(&want, "%s id eth0 %s\n", verb, r.Config)
	}
	if diff := cmp.Diff(want.String(), calls(t, dir)); diff != "" {
		t.Error(diff)
	}
}

// A plugin that deletes another attachment does not get the namespace of the caller's.
func TestEnvironment(t *testing.T) {
	t.Setenv("CNI_COMMAND", "ADD")
	t.Setenv("CNI_CONTAINERID", "id")
	t.Setenv("CNI_IFNAME", "eth0")
	t.Setenv("CNI_NETNS", "/run/netns/pod")
	t.Setenv("CNI_ARGS", "A=1")
	for _, c := range []struct{ verb, id, ifName, netns, args string }{
		{"ADD", "id", "eth0", "/run/netns/pod", "A=1"},
		{"DEL", "id", "eth0", "/run/netns/pod", "A=1"},
		{"ADD", "id", "eth1", "/run/netns/pod", "B=2"},
		{"DEL", "id", "eth1", "", ""},
		{"DEL", "other", "eth0", "", ""},
	} {
		r := request()
		r.ContainerID, r.IfName, r.Args = c.id, c.ifName, map[string]string{"B": "2"}
		var got []string
		for _, kv := range environment(r, c.verb) {
			if strings.HasPrefix(kv, "CNI_") {
				got = append(got, kv)
			}
		}
		want := []string{"CNI_ARGS=" + c.args, "CNI_COMMAND=" + c.verb, "CNI_CONTAINERID=" + c.id, "CNI_IFNAME=" + c.ifName,
			"CNI_NETNS=" + c.netns}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" || !slices.Contains(environment(r, c.verb), "PATH="+os.Getenv("PATH")) {
			t.Errorf("%+v: want the caller's other variables and, -want +got:\n%s", c, diff)
		}
	}
}

// Each kind of failure has an error code. If addresses may be allocated, Add calls DEL.
func TestForeignFails(t *testing.T) {
	for body, want := range map[string]string{
		`exit 0`:                                  "6 ipam fake: its result: ",
		`echo null`:                               "6 ipam fake: its result: ",
		`echo 7`:                                  "6 ipam fake: its result: ",
		`echo '{"ips":[]}{"ips":[]}'`:             "6 ipam fake: its result: ",
		`echo '{"cniVersion":"9.9.9"}'`:           "6 ipam fake: its result: ",
		`echo '{"cniVersion":"1.0.0"}'`:           "7 ipam fake: returned no addresses",
		`head -c 5000000 /dev/zero | tr '\0' ' '`: "6 ipam fake: its result: ",
		`echo '{"code":11,"msg":"busy","details":"d"}'; exit 1`: "11 ipam fake: busy; d",
		`echo '{"code":999,"msg":"full"}'; exit 1`:              "999 ipam fake: full",
		`echo '{"msg":"no code"}'; exit 1`:                      "5 ipam fake: failed without an error document: exit status 1",
		`echo garbage; exit 3`:                                  "5 ipam fake: failed without an error document: exit status 3",
		`kill -9 $$`:                                            "5 ipam fake: failed without an error document: signal: killed",
	} {
		dir := externalPlugin(t, `[ "$CNI_COMMAND" = DEL ] && exit 0; `+body)
		result, err := Runner{}.Add(request(dir), "fake")
		if err == nil {
			t.Errorf("%s: accepted as %+v", body, result)
			continue
		}
		if got := fmt.Sprint(plugin.Code(err), " ", err); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", body, got, want)
		}
		if log := calls(t, dir); strings.Count(log, "ADD ") != 1 || strings.Count(log, "DEL ") != 1 {
			t.Errorf("%s: calls %q", body, log)
		}
	}
}

func TestFind(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	for _, err := range []error{os.Mkdir(filepath.Join(first, "fake"), 0o755), os.WriteFile(filepath.Join(second, "fake"), nil, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if path, err := find([]string{"/nonexistent", first, second}, "fake"); err != nil || path != filepath.Join(second, "fake") {
		t.Errorf("got %s, %v: a folder is no plugin", path, err)
	}
	if _, err := find([]string{first}, "fake"); plugin.Code(err) != plugin.CodeConfig {
		t.Errorf("got %v", err)
	}
	if _, err := find(nil, "fake"); plugin.Code(err) != plugin.CodeConfig {
		t.Errorf("got %v", err)
	}
}

func TestNotExecutable(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "fake"), []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := (Runner{}).Add(request(dir), "fake"); plugin.Code(err) != plugin.CodeIO || !errors.Is(err, unix.EACCES) {
		t.Errorf("got %v", err)
	}
}

// A linked-in plugin gets a copy of the request with its own name and the right CNI command.
func TestBuiltin(t *testing.T) {
	var seen []string
	note := func(r *plugin.Request) error {
		seen = append(seen, r.Plugin+" "+r.Verb+" "+r.ContainerID)
		if r.ContainerID == "bad" {
			return plugin.Errorf(plugin.CodeExhausted, "full")
		}
		return nil
	}
	run := Runner{Builtin: []plugin.Plugin{{Name: "other"}, {Name: "in", Del: note, Check: note, Status: note,
		Add: func(r *plugin.Request) (*types100.Result, error) { return &types100.Result{}, note(r) }}}}
	r := request()
	_, err := run.Add(r, "in")
	for _, err := range []error{err, run.Check(r, "in"), run.Status(r, "in"), run.Del(r, "in"), run.GC(r, "in")} {
		if err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{"in ADD id", "in CHECK id", "in STATUS id", "in DEL id"}, seen); diff != "" || r.Plugin != "bridge" ||
		r.Verb != "ADD" {
		t.Errorf("%+v\n%s", r, diff)
	}
	r.ContainerID = "bad"
	if _, err := run.Add(r, "in"); plugin.Code(err) != plugin.CodeExhausted || err.Error() != "ipam in: full" {
		t.Errorf("got %v", err)
	}
	if !run.InProcess("in") || run.InProcess("fake") {
		t.Error("in process or not")
	}
}

func TestValidType(t *testing.T) {
	for name, ok := range map[string]bool{"host-local": true, "a.b": true, "": false, ".": false, "..": false, "a/b": false, "../x": false,
		"/bin/sh": false, "a\x00": false} {
		if err := ValidType(name); (err == nil) != ok || err != nil && plugin.Code(err) != plugin.CodeConfig {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// An external IPAM plugin ends when its caller is killed, or it could allocate addresses that no pod uses.
func TestKilledCaller(t *testing.T) {
	dir := externalPlugin(t, `mkfifo "$(dirname "$0")/pipe"; exec sleep 60`)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	child := ""
	for deadline := time.Now().Add(time.Minute); child == "" && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(dir, "pipe")); err == nil {
			child = childOf(t, cmd.Process.Pid)
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if child == "" {
		t.Fatal("the plugin did not start")
	}
	for deadline := time.Now().Add(time.Minute); running(child); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %s outlives its caller", child)
		}
	}
}

// childOf returns the child process of the process with this ID.
func childOf(t *testing.T, pid int) string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		if fields := statFields(path); len(fields) > 1 && fields[1] == fmt.Sprint(pid) {
			return filepath.Base(filepath.Dir(path))
		}
	}
	return ""
}

// statFields returns the fields of /proc/PID/stat after the program's name: state, parent, and so on (proc_pid_stat(5)).
func statFields(path string) []string {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	line, _ := bufio.NewReader(f).ReadString('\n')
	return strings.Fields(line[strings.LastIndex(line, ")")+1:])
}

func running(pid string) bool {
	fields := statFields("/proc/" + pid + "/stat")
	return len(fields) > 0 && fields[0] != "Z"
}

// FuzzResult checks that any output of an external plugin leads either to a result with addresses, or to an error with a code.
func FuzzResult(f *testing.F) {
	for _, seed := range []string{"", "null", "{}", `{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.5/24"}]}`,
		`{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.0.5/24"}]}`,
		`{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/24"}}`, `{"cniVersion":"1.0.0","ips":[null]}`, `{"code":7,"msg":"x"}`} {
		f.Add("1.0.0", seed)
		f.Add("0.4.0", seed)
		f.Add("0.2.0", seed)
	}
	f.Fuzz(func(t *testing.T, version, out string) {
		r := request()
		r.CNIVersion = version
		result, err := parse(r, []byte(out))
		if err != nil {
			if code := plugin.Code(err); code != plugin.CodeDecode && code != plugin.CodeConfig {
				t.Errorf("%q: %v", out, err)
			}
		} else if len(result.IPs) == 0 || result.IPs[0] == nil {
			t.Errorf("%q: %+v", out, result)
		}
		if err := delegateError([]byte(out), errors.New("x")); plugin.Code(err) == 0 {
			t.Errorf("%q: %v", out, err)
		}
	})
}
