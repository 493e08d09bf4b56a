// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// otherOwners caches descriptions of other attachments by the comment of their set elements.
type otherOwners struct {
	container string
	known     map[string]otherOwner
}

// otherOwner describes another attachment. One of the same container shares its ports with this one.
type otherOwner struct {
	name   string
	shares bool
}

// lookUp describes a port's owner and reads each record only once.
func (o otherOwners) lookUp(owner string) otherOwner {
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

// describeOwner names a port's owner, with the container and creation time that tell it from an earlier pod of the same name.
func describeOwner(rec attachment.Record, owner string) string {
	name := "container " + rec.ContainerID
	if rec.Pod != "" {
		name = ownerName(owner) + ", " + name
	}
	return name + ", since " + rec.Written.UTC().Format(time.RFC3339)
}

// moveToHeirs gives the ports of an ending attachment to others that requested them: those of the same container in other networks, or of
// an older live pod of the same name. ending is nil if the ports are unknown. The caller holds portsLock.
func moveToHeirs(host *kernel.Node, hash string, ending *ports.Index) error {
	// An attachment of the same container keeps its port even without its namespace; the next pod that requests the port also removes these
	// rules.
	own, _, _ := attachment.ByHash("portmap", hash) // recordedExcept reports the same error
	all, err := recordedExcept(hash, own.ContainerID)
	if err != nil {
		slog.Warn("some records cannot be read; hostPorts that this attachment shares with theirs are removed with it", "error", err)
	}
	var heirs []recordedPorts
	var wanted []ownedPorts
	for _, rec := range all {
		h := rec.wantedPorts()
		h.Ports = slices.DeleteFunc(slices.Clone(h.Ports), func(p ports.Port) bool { return ending != nil && !ending.Overlap(p, "") })
		if len(h.Ports) > 0 {
			heirs, wanted = append(heirs, rec), append(wanted, h)
		}
	}
	if len(heirs) == 0 {
		return nil
	}
	if err := moveHostPorts(host, hash, wanted); err != nil {
		return err
	}
	if _, err := restoreIPTables(heirs, true, slog.Default()); err != nil {
		slog.Warn(notRestored, "error", err)
	}
	return nil
}

// moveHostPorts moves ports to the attachments that request them, in one transaction. Ports of a third attachment, or that none requests,
// stay. It is a no-op if the rules are missing. The caller holds portsLock.
func moveHostPorts(host *kernel.Node, owner string, to []ownedPorts) error {
	if ok, err := HostportSchema().Intact(&host.NFT); err != nil || !ok {
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
