// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"log/slog"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// sharedPorts is the node's note that attachments share hostPorts. Without shared ports, DEL reads no records of other pods. If the note is
// missing, as after an earlier version, DEL reads them.
const (
	sharedPorts = "shared-hostports"
	someShared  = "some"
	noneShared  = "none"
)

// otherOwners are the other attachments with ports of an attachment, by the comments of elements.
type otherOwners struct {
	container string
	known     map[string]otherOwner
}

// otherOwner is one of these attachments. It shares its ports if it belongs to the same container.
type otherOwner struct {
	name   string
	shares bool
}

// of reads the record of an owner once.
func (o otherOwners) of(owner string) otherOwner {
	a, ok := o.known[owner]
	if !ok {
		a.name = ownerName(owner)
		if rec, found, err := attachment.ByHash("portmap", ownerHash(owner)); err == nil && found {
			a = otherOwner{describeOwner(rec, owner), rec.ContainerID == o.container}
		}
		o.known[owner] = a
	}
	return a
}

// describeOwner returns the name of an owner, with details that distinguish it from an earlier pod of the same name.
func describeOwner(rec attachment.Record, owner string) string {
	name := "container " + rec.ContainerID
	if rec.Pod != "" {
		name = ownerName(owner) + ", " + name
	}
	return name + ", since " + rec.Written.UTC().Format(time.RFC3339)
}

// passPorts passes the ports of an ending attachment to other attachments that asked for them: those of the same container in other
// networks, or an older live pod of the same name. ending holds its ports, or is nil if they are unknown. The caller holds the lock of the
// ports.
func passPorts(host *kernel.Node, hash string, ending *ports.Index) error {
	if noted, _ := attachment.NodeNoted(sharedPorts); noted == noneShared {
		return nil
	}
	// An attachment of the same container keeps its port although its namespace is gone. The next pod that asks for the port then removes
	// its rules too.
	own, _, _ := attachment.ByHash("portmap", hash) // recordedExcept reports the same error
	all, err := recordedExcept(hash, own.ContainerID)
	if err != nil {
		slog.Warn("some records cannot be read; hostPorts that this attachment shares with theirs are removed with it", "error", err)
	}
	var heirs []recorded
	var wanted []ownedPorts
	for _, rec := range all {
		h := rec.wanted()
		h.Ports = slices.DeleteFunc(slices.Clone(h.Ports), func(p ports.Port) bool { return ending != nil && !ending.Overlap(p, "") })
		if len(h.Ports) > 0 {
			heirs, wanted = append(heirs, rec), append(wanted, h)
		}
	}
	if len(heirs) == 0 {
		if shared, err := sharedExcept(hash); err != nil || shared {
			return nil
		}
		return attachment.NoteNode(sharedPorts, noneShared)
	}
	if err := passHostPorts(host, hash, wanted); err != nil {
		return err
	}
	if _, err := restoreIPTables(heirs, true, slog.Default()); err != nil {
		slog.Warn(notRestored, "error", err)
	}
	return nil
}

// passHostPorts passes the ports that an owner forwards to the attachments that ask for them, in one transaction. Ports of a third owner,
// and ports for which no attachment asks, stay. It is a no-op while the rules are missing. The caller holds portsLock.
func passHostPorts(host *kernel.Node, owner string, to []ownedPorts) error {
	if ok, err := marked(host, nft.HostportTable, schema); err != nil || !ok {
		return nft.IgnoreUnsupported(err)
	}
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	var want []nft.Element
	for _, h := range to {
		want = append(want, h.elements()...)
	}
	want = uniqueElements(want)
	has, err := t.Find(want)
	if err != nil {
		return err
	}
	var passed, missing []nft.Element
	for i, e := range want {
		if has[i] != nil && ownerHash(has[i].Comment) != ownerHash(owner) {
			continue
		}
		missing = append(missing, e)
		if has[i] != nil {
			passed = append(passed, *has[i])
		}
	}
	return t.Replace(uniqueElements(passed), missing)
}

// sharedExcept reports whether two attachments ask for one port, without the attachment whose key has the hash. An unfinished ADD counts.
func sharedExcept(hash string) (bool, error) {
	records, err := attachment.AllOf("portmap")
	var seen ports.Index
	for _, rec := range records {
		var st state
		if rec.Hash() == hash || json.Unmarshal(rec.State, &st) != nil || st.Ended {
			continue
		}
		if slices.ContainsFunc(st.Ports, func(p ports.Port) bool { return seen.Overlap(p, rec.Hash()) }) {
			return true, err
		}
		seen.Add(rec.Hash(), st.Ports...)
	}
	return false, err
}
