// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// The test binary also acts as the program in the sandbox, with the task in roleEnv.
const (
	roleEnv = "SANDBOX_TEST_ROLE"
	nobody  = 65534
)

// insideFacts is what a program observes in the sandbox.
type insideFacts struct {
	UID, GID     int
	OwnNetwork   bool // differs from that of the starting process
	OwnHostname  bool
	MarkGone     bool
	Links        []string
	LoopbackUp   bool
	Run, VarLib  []string // folder entries
	SysfsLinks   []string
	Dir          string
	Args         []string
	PropagatesTo string // remaining shared mounts
}

func play(role string) int {
	inside, code, err := sandbox.Enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	if !inside {
		return code
	}
	roles := map[string]func() int{
		"report": report, "exit7": func() int { return 7 }, "echo": echo, "trap": trap, "sleep": sleep,
		"crash": func() int { _ = unix.Kill(os.Getpid(), unix.SIGKILL); select {} }, "nest": enterNested, "forbid": enterForbidden,
	}
	return roles[role]()
}

func report() int {
	netns, _ := os.Readlink("/proc/self/ns/net")
	uts, _ := os.Readlink("/proc/self/ns/uts")
	_, marked := os.LookupEnv("PODLACE_SANDBOX_PARENT")
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	f := insideFacts{
		UID: os.Getuid(), GID: os.Getgid(), OwnNetwork: netns != os.Getenv("OUTER_NETNS"), OwnHostname: uts != os.Getenv("OUTER_UTS"),
		MarkGone: !marked,
		Run:      entries("/run"), VarLib: entries("/var/lib"), SysfsLinks: entries("/sys/class/net"), Args: os.Args[1:],
	}
	f.Dir, _ = os.Getwd()
	links, _ := net.Interfaces()
	for _, l := range links {
		f.Links = append(f.Links, l.Name)
		f.LoopbackUp = f.LoopbackUp || l.Name == "lo" && l.Flags&net.FlagUp != 0
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " shared:") || strings.Contains(line, " master:") {
			f.PropagatesTo += line
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		return 1
	}
	return 0
}

func entries(dir string) []string {
	names := []string{}
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names
}

func echo() int {
	if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
		return 1
	}
	fmt.Fprint(os.Stderr, "to stderr")
	return 0
}

func trap() int {
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGTERM, unix.SIGINT, unix.SIGUSR1)
	fmt.Println("ready")
	fmt.Println((<-got).String())
	return 5
}

func sleep() int {
	fmt.Println(os.Getpid())
	time.Sleep(time.Minute)
	return 0
}

func enterNested() int { return again("report", 0) }

// enterForbidden sets the limit of user namespaces to 0 and starts a program that enters a nested sandbox, with the user ID in ASK_UID.
func enterForbidden() int {
	if self, _ := os.Readlink("/proc/self/ns/user"); self == "user:[4026531837]" {
		fmt.Fprintln(os.Stderr, "this is the machine's own user namespace")
		return 2
	}
	if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	uid, _ := strconv.Atoi(os.Getenv("ASK_UID"))
	return again("report", uid)
}

func again(role string, uid int) int {
	cmd := player(role)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid), NoSetGroups: true}}
	}
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			fmt.Fprintln(os.Stderr, err)
		}
		return cmd.ProcessState.ExitCode()
	}
	return 0
}

func player(role string) *exec.Cmd {
	netns, _ := os.Readlink("/proc/self/ns/net")
	uts, _ := os.Readlink("/proc/self/ns/uts")
	cmd := exec.Command("/proc/self/exe", "-x", "two words")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, "OUTER_NETNS="+netns, "OUTER_UTS="+uts)
	return cmd
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantFacts(t *testing.T) insideFacts {
	dir, err := os.Getwd()
	must(t, err)
	return insideFacts{
		OwnNetwork: true, OwnHostname: true, MarkGone: true, Links: []string{"lo"}, LoopbackUp: true, Run: []string{"lock", "netns"},
		VarLib:     []string{},
		SysfsLinks: []string{"lo"}, Dir: dir, Args: []string{"-x", "two words"},
	}
}

func TestEnter(t *testing.T) {
	// On most machines mounts are shared, but in the sandbox of these tests they are private.
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	defer func() { must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")) }()
	for _, role := range []string{"report", "nest"} {
		t.Run(role, func(t *testing.T) {
			out, err := player(role).Output()
			if err != nil {
				t.Fatalf("%v\n%s", err, stderrOf(err))
			}
			var got insideFacts
			must(t, json.Unmarshal(out, &got))
			if diff := cmp.Diff(wantFacts(t), got); diff != "" {
				t.Errorf("seen from inside (-want +got):\n%s", diff)
			}
		})
	}
}

func stderrOf(err error) string {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(exit.Stderr)
	}
	return ""
}

func TestEnterExitCode(t *testing.T) {
	for role, want := range map[string]int{"exit7": 7, "crash": 128 + 9} {
		cmd := player(role)
		_ = cmd.Run()
		if got := cmd.ProcessState.ExitCode(); got != want {
			t.Errorf("%s: exit code %d, want %d", role, got, want)
		}
	}
}

func TestEnterStreams(t *testing.T) {
	cmd := player("echo")
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader("some\ninput"), &stdout, &stderr
	must(t, cmd.Run())
	if stdout.String() != "some\ninput" || stderr.String() != "to stderr" {
		t.Errorf("stdout %q, stderr %q", stdout.String(), stderr.String())
	}
}

func TestEnterPassesSignals(t *testing.T) {
	for _, s := range []syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGUSR1} {
		cmd, lines := startPlayer(t, "trap")
		must(t, cmd.Process.Signal(s))
		if got, want := nextLine(t, lines), s.String(); got != want {
			t.Errorf("inside got %q, want %q", got, want)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 5 {
			t.Errorf("%v: exit code %d, want that of the handler, 5", s, code)
		}
	}
}

func TestEnterDiesWithParent(t *testing.T) {
	cmd, lines := startPlayer(t, "sleep")
	pid, err := strconv.Atoi(lines.Text())
	must(t, err)
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	for range 300 {
		if !alive(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("process %d inside lives on after its parent was killed", pid)
	_ = unix.Kill(pid, unix.SIGKILL)
}

// startPlayer starts the test binary with a task and waits for its first line.
func startPlayer(t *testing.T, role string) (*exec.Cmd, *bufio.Scanner) {
	cmd := player(role)
	pipe, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	lines := bufio.NewScanner(pipe)
	nextLine(t, lines)
	return cmd, lines
}

func nextLine(t *testing.T, lines *bufio.Scanner) string {
	t.Helper()
	if !lines.Scan() {
		t.Fatal("the program inside said nothing")
	}
	return lines.Text()
}

func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

func TestEnterRefusesToHide(t *testing.T) {
	for _, c := range []struct{ env, dir, want string }{
		{"TMPDIR=/run/lock", "", "the temporary folder /run/lock lies below /run"},
		{"", "/run/netns", "the working directory /run/netns lies below /run"},
	} {
		cmd := player("report")
		cmd.Env, cmd.Dir = append(cmd.Env, c.env), c.dir
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != 3 || !strings.Contains(string(out), c.want) {
			t.Errorf("%s%s: exit code %d, %s", c.env, c.dir, cmd.ProcessState.ExitCode(), out)
		}
	}
}

// TestEnterForbidden calls Enter inside a user namespace that permits no further user namespaces.
func TestEnterForbidden(t *testing.T) {
	t.Run("root", func(t *testing.T) {
		cmd := player("forbid")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("root needs no user namespace, yet: %v\n%s", err, out)
		}
	})
	t.Run("ordinary user", func(t *testing.T) {
		needsUser(t)
		cmd := player("forbid")
		cmd.Env = append(cmd.Env, "ASK_UID="+strconv.Itoa(nobody))
		out, _ := cmd.CombinedOutput()
		want := "no space left on device (user.max_user_namespaces is 0: as root run `sysctl -w user.max_user_namespaces=10000`)"
		if cmd.ProcessState.ExitCode() != 3 || !strings.Contains(string(out), want) {
			t.Errorf("exit code %d, output:\n%s\nwant:\n%s", cmd.ProcessState.ExitCode(), out, want)
		}
	})
}

// needsUser skips a test unless it runs as root, which alone can start a process as another user.
func needsUser(t *testing.T) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.list=^$")
	cmd.Env = append(os.Environ(), roleEnv+"=none")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody, NoSetGroups: true}}
	if err := cmd.Start(); err != nil {
		t.Skipf("cannot become another user: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// TestAsOrdinaryUser runs many of these tests again as a user other than root.
func TestAsOrdinaryUser(t *testing.T) {
	needsUser(t)
	dir, err := os.MkdirTemp("", "ordinary")
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(dir+"/tmp", 0o777))
	must(t, os.Chmod(dir+"/tmp", 0o777))
	binary, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	must(t, os.WriteFile(dir+"/sandbox.test", binary, 0o755))

	cmd := exec.Command(dir+"/sandbox.test", "-test.v",
		"-test.run=^(TestEnter|TestPod.*)$")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir+"/tmp", "GOCOVERDIR="+dir+"/tmp", "HOME="+dir, "KERNELTEST=require")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody, NoSetGroups: true}}
	out, err := cmd.CombinedOutput()
	if err != nil || bytes.Count(out, []byte("--- PASS: ")) < 8 {
		t.Errorf("%v\n%s", err, out)
	}
}
