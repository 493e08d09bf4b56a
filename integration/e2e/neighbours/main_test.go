// SPDX-License-Identifier: Apache-2.0

// Package neighbours runs firewalld and Docker of Debian's packages on a simulated node with pods of Podlace, and tests what the documents
// say about them. Package node creates the node, so neither the programs nor their rules reach the machine. `make neighbours` fetches the
// packages and runs the tests.
//
//	NEIGHBOURS    folder with firewalld and Docker (scripts/neighbours.sh makes one)
//	PODLACE_BIN   folder of the plugins (default ../../../bin)
package neighbours

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/node"
)

const packagesEnv = "NEIGHBOURS"

func TestMain(m *testing.M) {
	if os.Getenv(packagesEnv) == "" { // newLab skips each test
		os.Exit(m.Run())
	}
	os.Exit(node.Lab{Needs: needs, Warm: furnish, Env: []string{"RUNTIME=none"}}.Main(m))
}

func needs() error {
	plugins, err := node.Plugins()
	if err != nil {
		return err
	}
	if _, err := os.Stat(plugins + "/podlace"); err != nil {
		return node.Unmet("run make build: " + err.Error())
	}
	return os.Setenv(harness.BinEnv, plugins)
}

// furnish gives the node the programs at their usual paths, a D-Bus, and an empty folder of CNI configurations. Without polkit, D-Bus lets
// root change firewalld.
func furnish() error {
	script := `
		mount -t overlay -o "lowerdir=$NEIGHBOURS/usr:/usr" overlay /usr
		cp -a "$NEIGHBOURS/etc/." /etc/
		cp -a /etc/firewalld /run/firewalld.shipped
		mkdir -p /run/dbus /var/lib/docker /etc/cni/net.d
		mount -t tmpfs tmpfs /var/lib/docker
		mount -t tmpfs tmpfs /etc/cni/net.d
		cat >/run/dbus/podlace.conf <<-END
			<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
			<policy context="default"><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>
		END
		dbus-daemon --config-file=/run/dbus/podlace.conf --fork --nopidfile`
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
