// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/podlace/podlace/conf"
)

// runningNode is the node of a running scripts/node.sh process.
type runningNode struct {
	dir, script string
	cmd         *exec.Cmd
	input       io.Closer // closing it ends the node; the kernel closes it if this process is killed
	pidns       string
	group       string
	sysctls     map[string]string // previous values
}

// kubeletSysctls returns sysctls that a kubelet sets and that apply to the whole machine.
func kubeletSysctls() map[string]string {
	values := map[string]string{}
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"} {
		data, _ := os.ReadFile("/proc/sys/" + name)
		values[name] = strings.TrimSpace(string(data))
	}
	return values
}

func startNode(dir string, s nodeFiles) (*runningNode, error) {
	if err := fillFolder(dir, s); err != nil {
		return nil, err
	}
	n := &runningNode{dir: dir, script: s.script, cmd: exec.Command(s.script, "run", dir), sysctls: kubeletSysctls()}
	n.cmd.Env = append(append(os.Environ(), "CNI_BIN="+s.plugins), s.env...)
	n.cmd.Stderr = os.Stderr
	input, err := n.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := n.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := n.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.script, err)
	}
	n.input, n.group = input, "podlace-node-"+strconv.Itoa(n.cmd.Process.Pid)
	if err := n.waitReady(output); err != nil {
		return nil, errors.Join(err, n.stopNode())
	}
	return n, nil
}

// fillFolder writes the input of node.sh: the image and the shipped conflist, with PODLACE_FORM=podlace-pod that of podlace-pod.
func fillFolder(dir string, s nodeFiles) error {
	shipped := conf.Default
	if os.Getenv("PODLACE_FORM") == "podlace-pod" {
		shipped = conf.Pod
	}
	conflist, err := conf.Conflist(shipped)
	if err != nil {
		return err
	}
	for _, sub := range []string{"net.d", "images"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "net.d", conf.Default), conflist, 0o600); err != nil {
		return err
	}
	return writeImage(filepath.Join(dir, "images", "busybox.tar"), s.busybox)
}

func (n *runningNode) waitReady(output io.Reader) error {
	begin := time.Now()
	line := make(chan error, 1)
	go func() {
		text, err := bufio.NewReader(output).ReadString('\n')
		if err == nil && text != "ready\n" {
			err = fmt.Errorf("node.sh prints %q", text)
		}
		line <- err
	}()
	select {
	case err := <-line:
		if err != nil {
			return err
		}
	case <-time.After(30 * time.Second):
		return errors.New("not ready within 30 s")
	}
	pid, err := os.ReadFile(filepath.Join(n.dir, "pid"))
	if err != nil {
		return err
	}
	n.pidns, err = os.Readlink("/proc/" + strings.TrimSpace(string(pid)) + "/ns/pid_for_children")
	fmt.Printf("node: ready in %d ms\n", time.Since(begin).Milliseconds())
	return err
}

// runTests runs this program again inside the node and returns its exit code.
func (n *runningNode) runTests() int {
	self, err := os.Executable()
	if err != nil {
		fmt.Println("FAIL:", err)
		return 1
	}
	cmd := exec.Command(n.script, append([]string{"exec", n.dir, self}, os.Args[1:]...)...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	fmt.Println("FAIL: tests in the node:", err)
	return 1
}

// stopNode ends the node. Its error lists leftovers on the machine.
func (n *runningNode) stopNode() error {
	_ = n.input.Close()
	if err := n.cmd.Wait(); err != nil {
		return fmt.Errorf("node.sh: %w", err)
	}
	var left []string
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + n.group)
	lone, _ := filepath.Glob("/sys/fs/cgroup/" + n.group)
	left = append(append(left, groups...), lone...)
	processes, _ := filepath.Glob("/proc/[0-9]*/ns/pid")
	for _, path := range processes {
		if ns, err := os.Readlink(path); err == nil && ns == n.pidns {
			left = append(left, path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.dir) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	for name, now := range kubeletSysctls() {
		if was := n.sysctls[name]; now != was {
			left = append(left, fmt.Sprintf("sysctl %s is %s and was %s", name, now, was))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("left on the machine: %s", strings.Join(left, ", "))
	}
	return nil
}

func logTail(dir string) string {
	logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	if len(logs) == 0 {
		return ""
	}
	data, err := os.ReadFile(logs[0])
	if err != nil {
		return ""
	}
	var lines []string
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, "level=info") && !strings.Contains(line, "level=warning") {
			lines = append(lines, "  "+line[:min(len(line)-1, 600)]+"\n")
		}
	}
	if len(lines) == 0 {
		return ""
	}
	return filepath.Base(logs[0]) + ", the last errors:\n" + strings.Join(lines[max(0, len(lines)-20):], "")
}

func isDynamic(path string) (bool, error) {
	f, err := elf.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return true, nil
		}
	}
	return false, nil
}
