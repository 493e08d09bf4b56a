// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
)

func build(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w %s", name, err, bytes.TrimSpace(out))
	}
	return nil
}

// pluginSet is one of the two compared plugin folders, with its name in the report.
type pluginSet struct{ name, folder string }

// usableSets returns the plugin sets that can run the chain on this machine, and a message with the missing program for each other set.
func (f pluginFolders) usableSets(s scenario) (usable []pluginSet, missing []string) {
	for _, each := range []pluginSet{{sideOurs, f.plugins}, {sideReference, f.reference}} {
		tool := neededTool(each.name, s)
		if _, err := exec.LookPath(tool); tool != "" && err != nil {
			missing = append(missing, fmt.Sprintf("%s, %s: %s is not installed", s.name, each.name, tool))
			continue
		}
		usable = append(usable, each)
	}
	return usable, missing
}

// neededTool returns the external program that the plugins of a chain start, or "". With nftables, only the reference plugin starts one.
func neededTool(side string, s scenario) string {
	switch {
	case s.backend == "iptables":
		return "iptables"
	case s.backend == "nftables" && side == sideReference:
		return "nft"
	default:
		return ""
	}
}
