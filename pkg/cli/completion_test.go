// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
)

// visibleCommands returns a command and all its subcommands that the help lists.
func visibleCommands(cmd *cobra.Command) (all []*cobra.Command) {
	all = append(all, cmd)
	for _, sub := range cmd.Commands() {
		if !sub.Hidden {
			all = append(all, visibleCommands(sub)...)
		}
	}
	return all
}

// TestExamples: each command without subcommands has examples with valid flags and arguments.
func TestExamples(t *testing.T) {
	for _, cmd := range visibleCommands(Command()) {
		if cmd.Example == "" && !cmd.HasSubCommands() {
			t.Errorf("%s --help shows no example", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			words := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "sudo "))
			if len(words) == 0 || words[0] != "podlace" {
				continue
			}
			found, args, err := Command().Find(words[1:])
			if err != nil || found.CommandPath() != cmd.CommandPath() {
				t.Errorf("%q calls %s: %v", line, found.CommandPath(), err)
				continue
			}
			if err := found.ParseFlags(args); err != nil {
				t.Errorf("%q: %v", line, err)
			}
		}
	}
}

// complete returns the values that a shell offers for the last argument.
func complete(t *testing.T, args ...string) []string {
	t.Helper()
	var out, errs bytes.Buffer
	if status := Run(append([]string{cobra.ShellCompNoDescRequestCmd}, args...), &out, &errs); status != exitOK {
		t.Fatalf("%q: status %d, %s", args, status, errs.String())
	}
	lines := strings.Fields(out.String())
	return lines[:len(lines)-1] // the last is the directive
}

// TestCompleteFormats: -o completes the formats that the command supports.
func TestCompleteFormats(t *testing.T) {
	for command, want := range map[string][]string{
		"ls": {"table", "wide", "json"}, "doctor": {"table", "json"}, "version": {"table", "json"}, "sriov ls": {"table", "json"},
	} {
		if diff := cmp.Diff(want, complete(t, append(strings.Fields(command), "-o", "")...)); diff != "" {
			t.Errorf("%s -o (-want +got):\n%s", command, diff)
		}
	}
}

// TestCompleteDevices: the sriov commands complete the PCI addresses of network cards.
func TestCompleteDevices(t *testing.T) {
	sysfs := t.TempDir()
	for address, class := range map[string]string{"0000:3b:02.1": "0x020000", "0000:3b:02.2": "0x020000", "0000:00:02.0": "0x030000"} {
		dir := filepath.Join(sysfs, "bus/pci/devices", address)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "class"), []byte(class+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, command := range []string{"explain", "reset"} {
		got := complete(t, "sriov", command, "--sysfs", sysfs, "")
		if diff := cmp.Diff([]string{"0000:3b:02.1", "0000:3b:02.2"}, got); diff != "" {
			t.Errorf("sriov %s (-want +got):\n%s", command, diff)
		}
		if got := complete(t, "sriov", command, "--sysfs", sysfs, "0000:3b:02.1", ""); len(got) > 0 {
			t.Errorf("sriov %s completes a second device: %q", command, got)
		}
	}
}

// TestRecordedNames: each recorded name is offered once, without control characters.
func TestRecordedNames(t *testing.T) {
	all := []attachment.Record{{Pod: "default/web-1"}, {Pod: "default/web-0"}, {Pod: "default/web-1"}, {}, {Pod: "a/\x1b[2J"}}
	got := distinctValues(all, func(rec attachment.Record) string { return rec.Pod })
	if diff := cmp.Diff([]string{plain("a/\x1b[2J"), "default/web-0", "default/web-1"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestVersionFlag(t *testing.T) {
	var out, errs bytes.Buffer
	if status := Run([]string{"--version"}, &out, &errs); status != exitOK || out.String() != "podlace version "+thisBuild().Version+"\n" {
		t.Errorf("status %d, %q, %q", status, out.String(), errs.String())
	}
}
