// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"testing"

	"github.com/podlace/podlace/pkg/iptables"
)

func firewallCases() map[string]breakage {
	const drop = "table inet foreign { chain forward { type filter hook forward priority 0; policy drop; }; }"
	return map[string]breakage{
		"policy drop": {"forward-policy", func(l *lab) { l.nft(drop) },
			"chain inet foreign forward of nf_tables has the policy drop, and none of its rules accepts packets of cnidoc | nft insert rule inet foreign forward iifname cnidoc accept"},
		"policy drop and drop rules": {"forward-policy", func(l *lab) {
			l.nft("table inet foreign { chain forward { type filter hook forward priority 0; policy drop; iifname cnidoc drop; oifname cnidoc reject; }; }")
		}, "chain inet foreign forward of nf_tables has the policy drop"},
		"policy drop and a drop rule of iptables-legacy": {"forward-policy", func(l *lab) {
			l.legacy("-P", "FORWARD", "DROP")
			l.legacy("-A", "FORWARD", "-i", "cnidoc", "-j", "DROP")
		}, "chain FORWARD of iptables-legacy has the policy drop"},
		"policy drop, without a conflist": {"forward-policy", func(l *lab) {
			l.pod("web", ours)
			l.nft(drop)
			l.command("rm", l.ConfDir+"/10-podlace.conflist")
		}, "a firewall drops the packets of pods on cnidoc"},
		"iptables' policy drop": {"forward-policy", func(l *lab) {
			l.nft("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }")
		}, "iptables -I FORWARD -i cnidoc -j ACCEPT; iptables -I FORWARD -o cnidoc -j ACCEPT"},
		"Docker": {"forward-policy", func(l *lab) {
			l.nft("table ip filter { chain DOCKER-USER { }; chain FORWARD { type filter hook forward priority 0; policy drop; jump DOCKER-USER; }; }")
		}, "| iptables -I DOCKER-USER -i cnidoc -j ACCEPT; iptables -I DOCKER-USER -o cnidoc -j ACCEPT"},
		"Docker, chains flushed": {"forward-policy", func(l *lab) {
			l.run("dockerd")
			l.nft("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }")
		}, "| iptables -I FORWARD -i cnidoc -j ACCEPT; iptables -I FORWARD -o cnidoc -j ACCEPT"},
		"policy drop of iptables-legacy": {"forward-policy", func(l *lab) { l.legacy("-P", "FORWARD", "DROP") },
			"chain FORWARD of iptables-legacy has the policy drop, and none of its rules accepts packets of cnidoc | iptables-legacy -I FORWARD -i cnidoc -j ACCEPT; " +
				"iptables-legacy -I FORWARD -o cnidoc -j ACCEPT"},
		"Docker with iptables-legacy": {"forward-policy", func(l *lab) {
			l.run("dockerd")
			l.legacy("-P", "FORWARD", "DROP")
			l.legacy("-N", "DOCKER-USER")
			l.legacy("-A", "FORWARD", "-i", "docker+", "-j", "ACCEPT")
			l.legacy("-A", "INPUT", "-i", "cnidoc", "-j", "ACCEPT")
		}, "| iptables-legacy -I DOCKER-USER -i cnidoc -j ACCEPT"},
		"ufw": {"forward-policy", func(l *lab) { l.write("etc/ufw/ufw.conf", "ENABLED=yes\n") }, "ufw route allow in on cnidoc"},
		"ufw and its chains": {"forward-policy", func(l *lab) {
			l.write("etc/ufw/ufw.conf", "ENABLED=yes\n")
			l.nft("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }; " +
				"table ip6 filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }")
		}, "none of its rules accepts packets of cnidoc | ufw route allow in on cnidoc; ufw route allow out on cnidoc"},
		"ufw, rule not loaded": {"forward-policy", func(l *lab) {
			l.write("etc/ufw/ufw.conf", "ENABLED=yes\n")
			l.write("etc/ufw/user.rules", "-A ufw-user-forward -i cnidoc -j ACCEPT\n")
			l.run("dockerd")
			l.nft("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }")
		}, "none of its rules accepts packets of cnidoc | ufw reload"},
		"flush ruleset": {"firewall-reload", func(l *lab) {
			l.write("etc/nftables.conf", "#!/usr/sbin/nft -f\nflush ruleset\n")
			l.write("etc/systemd/system/sysinit.target.wants/nftables.service", "")
		}, "nftables.service is enabled; podlace-reload.service is not enabled"},
		"firewalld, default zone": {"forward-policy", func(l *lab) {
			l.run("firewalld")
			l.write("etc/firewalld/zones/trusted.xml", `<zone target="ACCEPT"><interface name="cni0"/></zone>`)
		}, "firewall-cmd --permanent --zone=trusted --change-interface=cnidoc; firewall-cmd --zone=trusted --change-interface=cnidoc"},
		"firewalld and rules of iptables": {"firewall-reload", func(l *lab) {
			l.run("firewalld")
			l.byIPTables()
		}, "firewalld flushes the tables of iptables when it starts"},
		"NetworkManager": {"networkmanager", func(l *lab) { l.run("NetworkManager") }, "no unmanaged-devices names veth* and cnidoc"},
		"networkd": {"networkd", func(l *lab) {
			l.run("systemd-network")
			l.status(`{"ready": true}`)
		}, "ManageForeignRoutes is not set to no"},
	}
}

// unreadableCases puts a folder in place of another program's configuration file.
func unreadableCases() map[string]breakage {
	cases := map[string]breakage{}
	for file, c := range map[string]struct {
		check, what string
		prepare     func(*lab)
	}{
		"etc/ufw/ufw.conf":             {"forward-policy", "configuration of ufw", func(*lab) {}},
		"etc/default/ufw":              {"forward-policy", "rules of ufw", func(l *lab) { l.write("etc/ufw/ufw.conf", "ENABLED=yes\n") }},
		"etc/ufw/user.rules":           {"forward-policy", "rules of ufw", func(l *lab) { l.write("etc/ufw/ufw.conf", "ENABLED=yes\n") }},
		"etc/firewalld/zones/a.xml":    {"forward-policy", "zones of firewalld", func(l *lab) { l.run("firewalld") }},
		"etc/firewalld/firewalld.conf": {"forward-policy", "configuration of firewalld", func(*lab) {}},
		"etc/nftables.conf": {"firewall-reload", "rules of nftables.service", func(l *lab) {
			l.write("etc/systemd/system/sysinit.target.wants/nftables.service", "")
		}},
		"etc/NetworkManager/conf.d/a.conf": {"networkmanager", "configuration of NetworkManager", func(l *lab) { l.run("NetworkManager") }},
		"etc/systemd/networkd.conf": {"networkd", "configuration of systemd-networkd", func(l *lab) {
			l.run("systemd-network")
			l.status(`{"ready": true}`)
		}},
	} {
		cases["no access to "+file] = breakage{c.check, func(l *lab) {
			c.prepare(l)
			l.write(file+"/x", "")
		}, "warning could not read the " + c.what + " | read /"}
	}
	return cases
}

// byIPTables installs a conflist whose rules are in the tables of iptables.
func (l lab) byIPTables() {
	l.write("net.d/10-podlace.conflist", `{"name": "x", "plugins": [{"type": "bridge", "bridge": "cnidoc", "ipMasq": true, "ipMasqBackend": "iptables"}]}`)
}

// legacy runs iptables-legacy. Its rules are removed when the test ends.
func (l lab) legacy(args ...string) {
	l.t.Helper()
	if _, err := iptables.LegacyTables(true); err != nil {
		l.t.Skip("SKIPPED: in the namespaces of an ordinary user, the kernel hides the legacy tables:", err)
	}
	l.t.Cleanup(func() {
		l.command("iptables-legacy", "-P", "FORWARD", "ACCEPT")
		l.command("iptables-legacy", "-F")
		l.command("iptables-legacy", "-X")
	})
	l.command("iptables-legacy", args...)
}

// TestLegacyAccepts: a rule of iptables-legacy for the bridge, also as a wildcard, is no problem.
func TestLegacyAccepts(t *testing.T) {
	for _, link := range []string{"cnidoc", "cni+"} {
		l := newLab(t)
		l.legacy("-P", "FORWARD", "DROP")
		l.legacy("-A", "FORWARD", "-i", link, "-j", "ACCEPT")
		if found := l.problems("forward-policy"); len(found) > 0 {
			t.Errorf("%s: %q", link, found)
		}
	}
}
