// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/bridge"
)

// configText returns the text of all files that match the patterns.
func (n *node) configText(patterns ...string) (text string, err error) {
	for _, pattern := range patterns {
		files, _ := filepath.Glob(n.path(pattern))
		for _, file := range files {
			data, failed := os.ReadFile(file)
			err = errors.Join(err, failed)
			text += string(data) + "\n"
		}
	}
	return text, err
}

// setting returns the last value of a key in lines key=value, without quotes, or "".
func (n *node) setting(key string, patterns ...string) (value string, err error) {
	text, err := n.configText(patterns...)
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, "="); ok && strings.TrimSpace(k) == key {
			value = strings.Trim(strings.TrimSpace(v), `"'`)
		}
	}
	return value, err
}

// networkManager reports a NetworkManager that may change the interfaces of pods (NetworkManager.conf(5), unmanaged-devices).
func (n *node) networkManager() []Finding {
	if !n.running["NetworkManager"] {
		return skipped("NetworkManager does not run")
	}
	bridges := n.routedBridges()
	if len(bridges) == 0 {
		bridges = []string{bridge.NameIn(nil)}
	}
	text, err := n.configText("/etc/NetworkManager/NetworkManager.conf", "/etc/NetworkManager/conf.d/*.conf",
		"/usr/lib/NetworkManager/conf.d/*.conf",
		"/run/NetworkManager/conf.d/*.conf")
	if err != nil {
		return unknown("the configuration of NetworkManager", err)
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "unmanaged-devices") && strings.Contains(line, "veth") && strings.Contains(line, bridges[0]) {
			return nil
		}
	}
	names := "interface-name:veth*;interface-name:" + strings.Join(bridges, ";interface-name:")
	return []Finding{{Level: Warning, What: "NetworkManager may change the interfaces of pods",
		Evidence:    "NetworkManager runs, and no unmanaged-devices names veth* and " + bridges[0],
		Consequence: "it may set addresses, routes and MTU of the bridge, and remove those of Podlace at a restart",
		Command: fmt.Sprintf("printf '[keyfile]\\nunmanaged-devices+=%s\\n' >/etc/NetworkManager/conf.d/podlace.conf; nmcli general reload",
			names)}}
}

// networkd reports a systemd-networkd that removes routes of other programs (networkd.conf(5), ManageForeignRoutes).
func (n *node) networkd() []Finding {
	if !n.running["systemd-network"] { // 15 bytes of systemd-networkd
		return skipped("systemd-networkd does not run")
	}
	if _, err := readAgentStatus(); err != nil {
		return skipped("podlace-node, which adds routes, has not run here")
	}
	value, err := n.setting("ManageForeignRoutes", "/usr/lib/systemd/networkd.conf", "/usr/lib/systemd/networkd.conf.d/*.conf",
		"/etc/systemd/networkd.conf", "/run/systemd/networkd.conf.d/*.conf", "/etc/systemd/networkd.conf.d/*.conf")
	if err != nil || slices.Contains([]string{"0", "no", "n", "false", "f", "off"}, strings.ToLower(value)) { // systemd.syntax(7)
		return unknown("the configuration of systemd-networkd", err)
	}
	return []Finding{{Level: Warning, What: "systemd-networkd removes the routes to other nodes when it restarts",
		Evidence:    "systemd-networkd runs, and ManageForeignRoutes is not set to no",
		Consequence: "podlace-node restores them within a second; packets in between are lost",
		Command: "mkdir -p /etc/systemd/networkd.conf.d; printf '[Network]\\nManageForeignRoutes=no\\n' " +
			">/etc/systemd/networkd.conf.d/podlace.conf; systemctl restart systemd-networkd"}}
}
